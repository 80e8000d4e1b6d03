"""Reports, pages and exports of a run."""
