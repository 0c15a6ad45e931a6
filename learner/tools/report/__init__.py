"""The report of a run: one HTML page that needs no network. `page/` holds what a browser is given."""
