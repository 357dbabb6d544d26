"""How a tag gets to disk: aside, checked, made durable, renamed; in the background where asked."""
