"""What is shown of a run, an audit, a skill and an export: tables, pages and cards.  Never imports torch."""
