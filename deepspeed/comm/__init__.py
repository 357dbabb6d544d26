"""Communication: groups, collectives, logging. Names are exported lazily."""
