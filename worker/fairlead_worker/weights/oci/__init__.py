"""`oci://` models: images with the files under /models, and artifacts with one file in each layer.

Our own client on httpx: oras-py 0.2.43 compares no digests and resumes no download.
"""
