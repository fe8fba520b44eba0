"""The workers as this router sees them: who they are, how they are, how loaded, and what form their prompts have."""
