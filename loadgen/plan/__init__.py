"""What is sent when: arrivals, workloads, datasets, traces."""
