"""Who carries a planner's decisions out: processes of this host, a store that somebody scales by, or Kubernetes."""
