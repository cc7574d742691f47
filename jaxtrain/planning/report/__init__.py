"""Plans as text, HTML pages, plots and differences."""
