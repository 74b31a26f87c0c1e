"""What runs leave behind: stamps, logs, and the table of their results."""
