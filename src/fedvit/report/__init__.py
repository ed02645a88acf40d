"""Everything that people look at: the report page, tables, plots and progress."""
