"""Tables and figures from a table of results."""
