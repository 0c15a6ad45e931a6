"""The teacher of distillation that is a model of its own, in a process of its own (model.teacher)."""
