package archtest

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

// Hard limits; STYLE asks for 500 and 60.
const (
	maxFileLines = 800
	maxFuncLines = 100
	maxParams    = 5
)

type source struct {
	path string // relative to the repository
	dir  string
	ast  *ast.File
	text []byte
	test bool
}

// sources parses every Go file of ours that is not generated.
func sources(t *testing.T) (*token.FileSet, []source) {
	t.Helper()
	repo := testenv.Repo(t)
	set := token.NewFileSet()
	var files []source
	err := filepath.WalkDir(repo, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(repo, path)
		if err != nil {
			return err
		}
		if d.IsDir() && (slices.Contains([]string{".git", "build", "bin", "tools"}, rel) || d.Name() == "testdata") {
			return fs.SkipDir
		}
		if d.IsDir() || filepath.Ext(path) != ".go" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(set, path, text, parser.ParseComments)
		if err != nil {
			return err
		}
		if ast.IsGenerated(f) {
			return nil
		}
		files = append(files, source{rel, filepath.Dir(rel), f, text, strings.HasSuffix(path, "_test.go")})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return set, files
}

func TestFilesAndFunctionsAreShort(t *testing.T) {
	set, files := sources(t)
	for _, f := range files {
		if n := bytes.Count(f.text, []byte("\n")); n > maxFileLines {
			t.Errorf("%s has %d lines, more than %d: split it by noun", f.path, n, maxFileLines)
		}
		for _, d := range f.ast.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Body == nil || f.test {
				continue
			}
			if n := set.Position(fn.End()).Line - set.Position(fn.Pos()).Line + 1; n > maxFuncLines {
				t.Errorf("%s: %s has %d lines, more than %d", f.path, fn.Name.Name, n, maxFuncLines)
			}
			if n := fn.Type.Params.NumFields(); n > maxParams {
				t.Errorf("%s: %s has %d parameters, more than %d: pass a struct", f.path, fn.Name.Name, n, maxParams)
			}
		}
	}
}

func TestNothingRunsAtInit(t *testing.T) {
	_, files := sources(t)
	for _, f := range files {
		for _, d := range f.ast.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
				t.Errorf("%s has an init()", f.path)
			}
		}
	}
}

// Package variables are tables and sentinels: no function assigns to them or to what
// they hold. (A method that changes its receiver is beyond this test.)
func TestPackageVariablesAreNeverAssigned(t *testing.T) {
	set, files := sources(t)
	global := map[string]map[string]*ast.ValueSpec{} // by directory and name
	for _, f := range files {
		for _, d := range f.ast.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.VAR {
				continue
			}
			for _, s := range g.Specs {
				spec := s.(*ast.ValueSpec)
				for _, n := range spec.Names {
					if global[f.dir] == nil {
						global[f.dir] = map[string]*ast.ValueSpec{}
					}
					global[f.dir][n.Name] = spec
				}
			}
		}
	}
	for _, f := range files {
		report := func(e ast.Expr) {
			id := root(e)
			if id == nil || id.Name == "_" || global[f.dir][id.Name] == nil {
				return
			}
			// An identifier that the parser resolved to something else is a local one.
			if id.Obj != nil && id.Obj.Decl != global[f.dir][id.Name] {
				return
			}
			t.Errorf("%s: assigns to the package variable %s", set.Position(e.Pos()), id.Name)
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.AssignStmt:
				for _, e := range n.Lhs {
					report(e)
				}
			case *ast.IncDecStmt:
				report(n.X)
			}
			return true
		})
	}
}

// root returns the identifier that an assignable expression starts from.
func root(e ast.Expr) *ast.Ident {
	for {
		switch x := e.(type) {
		case *ast.Ident:
			return x
		case *ast.IndexExpr:
			e = x.X
		case *ast.SelectorExpr:
			e = x.X
		case *ast.StarExpr:
			e = x.X
		case *ast.ParenExpr:
			e = x.X
		default:
			return nil
		}
	}
}

func TestExportedNamesAreDocumented(t *testing.T) {
	set, files := sources(t)
	for _, f := range files {
		if f.test || f.ast.Name.Name == "main" {
			continue
		}
		for _, d := range f.ast.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Name.IsExported() && d.Doc == nil && exportedReceiver(d) && !wellKnown(d) {
					t.Errorf("%s: %s has no comment", set.Position(d.Pos()), d.Name.Name)
				}
			case *ast.GenDecl:
				undocumented(d, func(n *ast.Ident) {
					t.Errorf("%s: %s has no comment", set.Position(n.Pos()), n.Name)
				})
			}
		}
	}
}

// undocumented calls report for each exported type, variable and constant that neither
// has a comment nor stands in a group that has one.
func undocumented(d *ast.GenDecl, report func(*ast.Ident)) {
	for _, s := range d.Specs {
		switch s := s.(type) {
		case *ast.TypeSpec:
			if s.Name.IsExported() && d.Doc == nil && s.Doc == nil && s.Comment == nil {
				report(s.Name)
			}
		case *ast.ValueSpec:
			for _, n := range s.Names {
				if n.IsExported() && d.Doc == nil && s.Doc == nil && s.Comment == nil {
					report(n)
				}
			}
		}
	}
}

func exportedReceiver(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	e := d.Recv.List[0].Type
	if s, ok := e.(*ast.StarExpr); ok {
		e = s.X
	}
	id, ok := e.(*ast.Ident)
	return ok && id.IsExported()
}

// wellKnown tells whether a method's contract is that of an interface of the standard
// library, which its name alone says.
func wellKnown(d *ast.FuncDecl) bool {
	return d.Recv != nil && slices.Contains([]string{
		"Error", "String", "Unwrap", "Is", "As", "Close", "Read", "Write", "MarshalText", "UnmarshalText",
		"MarshalJSON", "UnmarshalJSON", "Len", "Less", "Swap", "ServeHTTP", "LogValue", "Format",
	}, d.Name.Name)
}

// docs/guarantees.md names the test behind each promise; a renamed test must not leave a
// promise without one.
func TestGuaranteesNameTestsThatExist(t *testing.T) {
	_, files := sources(t)
	have := map[string]bool{}
	for _, f := range files {
		for _, d := range f.ast.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && f.test {
				have[fn.Name.Name] = true
			}
		}
	}
	text, err := os.ReadFile(filepath.Join(testenv.Repo(t), "docs", "guarantees.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range regexp.MustCompile(`\bTest[A-Z]\w+`).FindAllString(string(text), -1) {
		if !have[name] {
			t.Errorf("docs/guarantees.md names %s, which is not there", name)
		}
	}
	for _, m := range regexp.MustCompile(`e2e: (\w+)`).FindAllStringSubmatch(string(text), -1) {
		if m[1] != "X" && !have["test"+m[1]] {
			t.Errorf("docs/guarantees.md names the part %s of TestNode, which is not there", m[1])
		}
	}
}
