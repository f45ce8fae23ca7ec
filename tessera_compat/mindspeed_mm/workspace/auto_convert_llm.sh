# Write NAME_mindspore.sh beside each launch script below examples/, or beside the scripts that are named:
#   source auto_convert_llm.sh [JOB.sh ...]
# Nothing is downloaded, and no source is rewritten. torchrun becomes msrun; what MindSpore lacks is switched off.
tessera migrate mindspore --form llm --overwrite "${@:-examples}"
