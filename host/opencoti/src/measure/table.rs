//! Tables in plain text, also valid as Markdown.

/// Rows of cells under a heading.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub fn new(columns: &[&str]) -> Table {
        Table { rows: vec![columns.iter().map(|&c| c.to_owned()).collect()] }
    }

    /// Adds a row; cells that are missing stay empty.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows[0].len();
        let cell = |row: &'_ Vec<String>, c: usize| row.get(c).cloned().unwrap_or_default();
        let widths: Vec<usize> = (0..columns)
            .map(|c| self.rows.iter().map(|row| cell(row, c).chars().count()).max().unwrap_or(0).max(3))
            .collect();
        for (r, row) in self.rows.iter().enumerate() {
            for (c, &width) in widths.iter().enumerate() {
                // Names to the left, numbers to the right.
                match c {
                    0 => write!(f, "| {:<width$} ", cell(row, c))?,
                    _ => write!(f, "| {:>width$} ", cell(row, c))?,
                }
            }
            writeln!(f, "|")?;
            if r == 0 {
                for (c, &width) in widths.iter().enumerate() {
                    let dashes = "-".repeat(width + 1);
                    write!(f, "|{dashes}{}", if c == 0 { "-" } else { ":" })?;
                }
                writeln!(f, "|")?;
            }
        }
        Ok(())
    }
}

/// A number with about three digits, small ones with an exponent.
pub fn number(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if !value.is_finite() => "-".to_owned(),
        0.0 => "0".to_owned(),
        _ if size < 1e-3 => format!("{value:.2e}"),
        _ if size < 1.0 => format!("{value:.4}"),
        _ if size < 100.0 => format!("{value:.2}"),
        _ if size < 1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["test", "n"]);
        table.row(vec!["decode".to_owned(), "12345".to_owned()]);
        table.row(vec!["x".to_owned()]);
        let expected = "| test   |     n |\n|--------|------:|\n| decode | 12345 |\n| x      |       |\n";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn numbers_keep_about_three_digits() {
        let shown = [0.0, 1.234e-5, 0.12345, 12.345, 123.45, 12345.6, f64::NAN].map(number);
        assert_eq!(shown, ["0", "1.23e-5", "0.1235", "12.35", "123.5", "12346", "-"]);
    }
}
