"""What precision costs in quality: trained models on a fixed text."""
