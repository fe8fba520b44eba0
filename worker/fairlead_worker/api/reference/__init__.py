"""Generated API reference: the OpenAPI document and the table of request fields."""
