"""The files that ``torch.save`` writes and ``torch.load`` reads, without torch: what tools need to start at once.

    archive.py    the zip archive: records written in order, found again by name
    tensors.py    a tensor as a place in mapped bytes: dtype, shape, strides
    packs.py      tensors made of parts, and a file ready to be written (``utils/torch_file.py`` writes the same)
    load.py       a file's object, its tensors mapped; names of torch that hold no tensor stay names
    cast.py       floats in another dtype
    save.py       an object's file, as torch would write it
    bridge.py     from and to torch's own tensors, where an answer needs arithmetic

Invariant: nothing here imports torch but ``bridge.py``, inside its functions.
"""
