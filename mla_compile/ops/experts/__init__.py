"""Router, routed experts and shared experts of MoE layers."""
