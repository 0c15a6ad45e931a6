"""Multi-turn rollouts: environments and tools that answer what the policy samples."""
