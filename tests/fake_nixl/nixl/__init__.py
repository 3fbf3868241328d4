"""Stands for the NIXL package in the helper process of tests: files, a folder of objects, bad manners on demand."""
