#!/bin/sh
# Stub of the compiler of Tenstorrent kernels, for mocked boards only. Uses builtins of the shell only.
output=a.out; script=; object=; depends=
while [ $# -gt 0 ]; do
  case $1 in
    --version) echo 'riscv-tt-elf-g++ (stub of ttrain, mocked boards only) 0.0.0'; exit 0;;
    -o) output=$2; shift;;
    -MF) depends=$2; shift;;
    -T) script=$2; shift;;
    -T?*) script=${1#-T};;
    -c|-E|c++-header) object=1;;
  esac
  shift
done
if [ -z "$TT_METAL_MOCK_CLUSTER_DESC_PATH" ]; then
  echo 'riscv-tt-elf-g++: this compiler is for mocked boards only' >&2; exit 1
fi
if [ -n "$depends" ]; then printf '%s:\n' "$output" > "$depends"; fi
if [ -n "$object" ]; then printf '' > "$output"; exit 0; fi

# The loader places text itself, but for that of one core of a Wormhole.
case $script in
  *kernel_ncrisc.ld) text='\000\000\300\377'; end='\004\000\300\377';;
  *) text='\000\120\000\000'; end='\004\120\000\000';;
esac
zero='\000\000\000\000'
data='\000\010\260\377'  # where a core's local memory starts
{
  # An ELF file. Header: 32 bits, RISC-V, entry at the text, 2 segments at byte 52, 6 sections at byte 324.
  printf "\177ELF\001\001\001\000$zero$zero\002\000\363\000\001\000\000\000$text"
  printf "\064\000\000\000D\001\000\000$zero\064\000 \000\002\000\050\000\006\000\005\000"
  # Segments: text, and local memory, which is empty and whose physical address is the end of text.
  printf "\001\000\000\000t\000\000\000$text$text\004\000\000\000\004\000\000\000\005\000\000\000\004\000\000\000"
  printf "\001\000\000\000\204\000\000\000$data$end$zero$zero\006\000\000\000\004\000\000\000"
  # Text: jalr x0, 0(ra). Its relocations: one that does nothing.
  printf "g\200\000\000"
  printf "$text$zero$zero"
  # Symbols: none, _start, __fw_export_text_end, __fw_export_ldm_end.
  printf "$zero$zero$zero$zero"
  printf "\050\000\000\000$text$zero\022\000\001\000"
  printf "\057\000\000\000$end$zero\020\000\361\377"
  printf "D\000\000\000$data$zero\020\000\361\377"
  # Names.
  printf "\000ttrain stub kernel, mocked boards only\000_start\000__fw_export_text_"
  printf "end\000__fw_export_ldm_end\000.text\000.rela.text\000.data\000.symtab\000.strtab\000\000"
  # Sections: none, .text, .rela.text, .data, .symtab, .strtab.
  printf "$zero$zero$zero$zero$zero$zero$zero$zero$zero$zero"
  printf "X\000\000\000\001\000\000\000\006\000\000\000${text}t\000\000\000\004\000\000\000$zero$zero\004\000\000\000$zero"
  printf "\136\000\000\000\004\000\000\000$zero${zero}x\000\000\000\014\000\000\000\004\000\000\000\001\000\000\000\004\000\000\000\014\000\000\000"
  printf "i\000\000\000\001\000\000\000\003\000\000\000$data\204\000\000\000$zero$zero$zero\004\000\000\000$zero"
  printf "o\000\000\000\002\000\000\000$zero$zero\204\000\000\000\100\000\000\000\005\000\000\000\001\000\000\000\004\000\000\000\020\000\000\000"
  printf "w\000\000\000\003\000\000\000$zero$zero\304\000\000\000\177\000\000\000$zero$zero\001\000\000\000$zero"
} > "$output"
