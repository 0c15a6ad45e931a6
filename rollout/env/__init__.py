"""Multi-turn rollouts: plays trajectories in which environments and tools answer what the policy samples."""
