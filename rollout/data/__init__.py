"""Problems: reads them from data sources, makes prompts of them, and keeps track of which are done."""
