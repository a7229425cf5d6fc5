"""What is predicted: masked-language modelling."""
