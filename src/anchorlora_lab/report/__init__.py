"""Tables, figures and pages from records.  Never imports torch."""
