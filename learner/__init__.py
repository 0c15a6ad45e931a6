"""Consumer and composition root: groups in, adapters out."""
