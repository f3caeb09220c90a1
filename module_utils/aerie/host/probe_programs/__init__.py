"""Programs of the active probes: run by the release's own Python on a host, standard library and torch only."""
