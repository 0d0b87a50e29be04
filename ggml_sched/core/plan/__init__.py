"""Planning: from a graph and the support of backends to a plan."""
