"""The process that runs a pod's trainers as the job server says."""
