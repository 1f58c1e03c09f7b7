"""What happens in front of Dynamo: loops over experts that branch on data become straight lines it can capture."""
