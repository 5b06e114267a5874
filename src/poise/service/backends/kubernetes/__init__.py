"""The Kubernetes back end: jobs as pods, and the scheduler of pods that others create."""
