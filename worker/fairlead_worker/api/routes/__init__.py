"""One APIRouter for each API, and what its operations take and return."""
