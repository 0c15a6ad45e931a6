"""Kinds of frozen base models beside a plain one: mapped from the generator, sharded over ranks, quantised."""
