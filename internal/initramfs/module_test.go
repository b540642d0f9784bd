package initramfs

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"strings"
	"testing"
)

// fakeModule returns an ELF file with nothing but a section .modinfo.
func fakeModule(fields ...string) []byte {
	fields = append([]string{"vermagic=" + release + " SMP preempt mod_unload "}, fields...)
	info := strings.Join(fields, "\x00") + "\x00"
	const names = "\x00.modinfo\x00.shstrtab\x00"
	const headerSize, sectionSize = 64, 64
	var b bytes.Buffer
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) }
	infoAt, namesAt := uint64(headerSize), uint64(headerSize+len(info))
	put(elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Shoff: namesAt + uint64(len(names)), Ehsize: headerSize, Shentsize: sectionSize, Shnum: 3, Shstrndx: 2,
	})
	b.WriteString(info)
	b.WriteString(names)
	put(elf.Section64{})
	put(elf.Section64{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: infoAt, Size: uint64(len(info))})
	put(elf.Section64{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: namesAt, Size: uint64(len(names))})
	return b.Bytes()
}

func FuzzParseInfo(f *testing.F) {
	f.Add(fakeModule("depends=a,b", "softdep=pre: c post: d"))
	f.Add([]byte("\x7fELF"))
	f.Fuzz(func(t *testing.T, data []byte) {
		info, err := parseInfo(data)
		if err != nil {
			return
		}
		for _, name := range append(info.depends, info.softDepends...) {
			if name == "" || strings.ContainsAny(name, "-,") {
				t.Errorf("module name %q", name)
			}
		}
	})
}
