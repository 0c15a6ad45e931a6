"""Producers: problems in, groups of scored completions out, as Arrow tables."""
