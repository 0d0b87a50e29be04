"""Loads the plugin of the contract suite for `pytest --pyargs ggml_sched.testing`, and does nothing in other runs.

pytest imports the plugins of all installed packages in every run.  So this module stands outside the package, and
imports nothing: neither the package nor its options slow down or disturb the tests of others.
"""


def pytest_load_initial_conftests(early_config, args):
    if any(str(argument).startswith("ggml_sched.testing") for argument in args):
        early_config.pluginmanager.import_plugin("ggml_sched.testing.plugin")
