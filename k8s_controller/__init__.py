"""The controller of TrainingJobs: elastic trainings on Kubernetes."""
