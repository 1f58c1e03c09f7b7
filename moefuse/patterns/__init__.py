"""What MoE code means: facts over axes, and one file of rules per component."""
