"""From a graph to a plan and its program: choosing, keeping, checking, saving and showing plans."""
