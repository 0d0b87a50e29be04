"""For authors of backends: comparing two backends, failures on demand, a deferred-execution device."""
