"""Runs code that the policy wrote, in processes of its own, which confine themselves (cluster.confinement)."""
