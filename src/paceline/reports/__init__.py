"""Reports on runs, for people: terminal output, tables, charts, HTML page, Chrome trace."""
