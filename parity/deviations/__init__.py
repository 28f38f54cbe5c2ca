"""One file a framework: its deviations, each with its reason, its size, and the conversion after which both agree."""
