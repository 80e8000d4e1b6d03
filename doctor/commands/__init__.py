"""The commands of vtune doctor and vtune playbook."""
