"""All output for people: the report page, tables, plots and progress."""
