"""The command line that starts training processes. Imports nothing here: the launcher must start in milliseconds."""
