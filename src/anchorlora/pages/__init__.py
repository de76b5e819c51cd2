"""Tables, pages and cards of a run, an audit, a skill and an export.  Never imports torch."""
