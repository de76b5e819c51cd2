"""Every table of a report, as data."""
