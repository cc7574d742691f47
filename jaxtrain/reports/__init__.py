"""Reports on runs: histories, tables, plots and HTML pages."""
