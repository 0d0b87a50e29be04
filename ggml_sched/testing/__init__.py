"""For authors of backends: comparing two backends, failures on demand, a device whose queue runs late."""
