"""A run in a terminal, while it trains or afterwards: curves, steps, completions. Nothing else imports textual."""
