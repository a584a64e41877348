"""Capture inside a job that somebody else wrote: switched on by the environment, without an edit.

``activate`` (one level up) runs at the start of every process and lets the modules here patch what they know when it is
imported: ``models`` (Hugging Face and Megatron models of any script), ``vllm`` (workers), ``verl`` (training workers)
and ``verl_trainer`` (the driver), ``ray`` (the environment of workers elsewhere), ``msprobe`` (verl's own profiler).
All of them record through the one ``session`` of their process.
"""
