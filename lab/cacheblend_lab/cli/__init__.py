"""The lab's commands. The core's command line finds them by their entry points, so that it need not import the lab."""
