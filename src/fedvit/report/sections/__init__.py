"""The content of each section of the report, as plain data that the section's template turns into markup."""
